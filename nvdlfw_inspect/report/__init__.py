"""What a person sees of a run: tables in the terminal and in notebooks, and a page of charts."""
