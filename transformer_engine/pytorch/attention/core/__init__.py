"""What attention backends share: the call, its formats, its place among projections."""
