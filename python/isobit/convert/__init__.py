"""Makes directories in the form of Hugging Face out of other files of models."""
