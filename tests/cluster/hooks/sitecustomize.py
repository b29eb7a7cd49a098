"""What happens to the processes of Ray that run in a test: rows that take long, or that kill who computes them."""

import os
import signal
import sys
import time

if any("default_worker.py" in one for one in sys.orig_argv):
    import encast.artifact as artifacts
    from encast.errors import ArtifactError
    from encast.jobs.answers import Answers

    plain = Answers.of

    def of(self, group):  # type: ignore[no-untyped-def]
        if "ENCAST_TEST_CARDS_SEEN" in os.environ:
            with open(os.path.join(os.environ["ENCAST_TEST_CARDS_SEEN"], str(os.getpid())), "w") as file:
                file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
        for row in group:
            if "poison" in row.raw:
                os.kill(os.getpid(), signal.SIGKILL)
            if "slow" in row.raw:
                time.sleep(0.02)
        return plain(self, group)

    Answers.of = of
    if "ENCAST_TEST_WITHOUT_ARTIFACT" in os.environ:

        def nothing(path):
            raise ArtifactError(f"{path} is not there")

        artifacts.open = nothing
