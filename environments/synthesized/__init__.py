"""Environments made for training: composed from a target's generators, or written by a language model."""
