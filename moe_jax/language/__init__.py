"""Decoder language models over text: data, model, training and decoding."""
