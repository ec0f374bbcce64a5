"""A clock that steps, for one process and not for its neighbours: a library put before libc's."""

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Seconds by which the process's clock is off: the first eight bytes of the file that CLOCK_STEP names. */
static long long step(void) {
    static volatile const long long *seconds;
    static int tried;
    if (!tried) {
        tried = 1;
        const char *name = getenv("CLOCK_STEP");
        int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
        if (file >= 0) {
            void *found = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
            close(file);
            if (found != MAP_FAILED) seconds = found;
        }
    }
    return seconds ? *seconds : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += step();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (where) *where = precise.tv_sec;
    return precise.tv_sec;
}
"""


def build(folder: Path) -> Path | None:
    """The library; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    (folder / "clock.c").write_text(SOURCE)
    library = folder / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(folder / "clock.c"), "-ldl"]
    return library if subprocess.run(command, capture_output=True).returncode == 0 else None


def set_step(path: Path, seconds: int) -> None:
    """In place: the process has the file mapped."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.write(struct.pack("q", seconds))
