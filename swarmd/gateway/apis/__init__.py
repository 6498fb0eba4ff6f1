"""The APIs that programs speak: OpenAI's and Anthropic's, their requests, answers and refusals."""
