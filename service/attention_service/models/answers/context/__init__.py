"""The sources of an answer: which part of its context made each of its sentences."""
