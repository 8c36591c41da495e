"""The parts of `train_gpt.py` and `generate.py`: settings, text, model, training, report."""
