"""Stands in for torch where a test asks an interpreter what it has: importing it costs nothing."""


class cuda:
    @staticmethod
    def device_count():
        return 0
