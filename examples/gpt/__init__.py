"""The parts of `train_gpt.py`: settings, text, model, training, report."""
