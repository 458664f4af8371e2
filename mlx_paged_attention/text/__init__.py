"""From text to token ids and back: tokenizer, chat templates, incremental detokenizer. Imports no MLX."""
