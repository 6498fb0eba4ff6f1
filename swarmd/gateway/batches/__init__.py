"""Many requests in one file, answered when there is room: OpenAI's files and batches, kept on disk."""
