"""What a person touches: LLM, AsyncLLM, the command line, the server. Imports no MLX."""
