"""What attention backends share: the description of a call, tensor formats, and projections."""
