"""A loaded model: its weights, its tokenizer and its attentions."""
