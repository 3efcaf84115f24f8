"""Everything about the model: flat vectors, codecs, references, triggers, modes, tasks. It knows no network."""
