"""The worker: scheduler, batches, block tables, KV cache, dispatch and the step itself."""
