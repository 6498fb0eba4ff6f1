"""The worker that serves: sessions, fine-tuning, and the queue of their ops."""
