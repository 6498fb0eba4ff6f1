"""Models as data: manifests, configurations, adapters and the headers of their files."""
