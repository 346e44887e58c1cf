"""Analyses beside the four questions: attribution, effects of edits, circuits, similarity, rollout and retrieval."""
