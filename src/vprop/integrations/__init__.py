"""vprop where people train: Lightning, Hugging Face, scikit-learn. Each module needs its framework, none the others."""
