"""The operations about modules and raw attention, one file each, from the forward pass to retrieval.

``complexity`` has their costs, ``analysis`` what circuits, rollouts and similarities share.

It imports ``scheduling`` and the rooms below it. Read ``questions.py`` first.
"""
