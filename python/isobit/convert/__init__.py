"""Makes model directories in Hugging Face's format from model files of other formats."""
