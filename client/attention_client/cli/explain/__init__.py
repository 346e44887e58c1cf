"""``attention explain``: one query's attention step by step."""
