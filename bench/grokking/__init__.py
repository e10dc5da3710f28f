"""The grokking experiments of arXiv 2605.08464, and a few that go further."""
