"""BFCL's single-turn tasks: a question, signatures of functions, and one line of calls as the answer."""
