"""The seeded decoder with multi-head latent attention, and its kernels."""
