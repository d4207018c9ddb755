import os


class CpuPlatform:
    def is_cuda(self):
        return False

    def is_cpu(self):
        return os.environ.get("FAKE_PLATFORM", "cpu") == "cpu"


current_platform = CpuPlatform()
