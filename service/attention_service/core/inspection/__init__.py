"""Looking into attention: weights, their statistics, effects of edits, attribution, rollout, similarity, circuits."""
