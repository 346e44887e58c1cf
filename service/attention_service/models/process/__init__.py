"""The process of one model: the loop that takes requests and answers them, and the operations that it knows."""
