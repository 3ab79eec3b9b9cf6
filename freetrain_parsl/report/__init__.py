"""Reports of a run: its state folded from the journal, its figures, its live view and its timeline."""
