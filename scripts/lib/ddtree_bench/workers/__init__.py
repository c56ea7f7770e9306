"""What runs in child processes: everything here may import torch and vLLM."""
