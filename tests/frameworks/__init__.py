"""Whole trainings inside other people's loops: plain DDP, Lightning, accelerate, each a script that users could write.

``task`` is what all of them train and what they report; ``train_*`` are the scripts; ``test_frameworks`` runs them and
judges. They need the extra ``frameworks``: ``pip install -c constraints.txt -e '.[test,frameworks]'``.
"""
