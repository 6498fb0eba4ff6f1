"""A machine that systemd manages: systemd as the first process of namespaces of its own, over a copy-on-write root.

Nothing of the machine's own is touched: what is written goes to memory and is gone with the namespaces. Needs root and
systemd. Inside lie this Python under /opt/python, the packages of this environment, this tree, and a ``swarmd`` as
users would install it, /opt/swarmd/bin/swarmd. The network is a loopback of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SWARMD = "/opt/swarmd/bin/swarmd"
SYSTEMD = "/lib/systemd/systemd"
NAMESPACES = ("--pid", "--mount", "--cgroup", "--uts", "--ipc", "--net")
BOOT = """set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/up /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work /mnt/root
cd /mnt/root
mkdir -p opt/python opt/packages opt/repo
mount --bind {python} opt/python
mount --bind {packages} opt/packages
mount --bind {repo} opt/repo
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mkdir sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
mount -t tmpfs tmpfs dev
for n in null zero full random urandom tty; do touch dev/$n; mount --bind /dev/$n dev/$n; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for n in dev/shm run tmp; do mount -t tmpfs -o mode=1777 tmpfs $n; done
printf '[Unit]\\nRequires=basic.target dbus.service systemd-logind.service\\nAfter=basic.target\\n' \\
    > etc/systemd/system/lab.target
printf 'lab:x:4711:4711::/home/lab user:/bin/sh\\n' >> etc/passwd
printf 'lab:x:4711:\\n' >> etc/group
printf 'lab:*:19000:0:99999:7:::\\n' >> etc/shadow
mkdir -p 'home/lab user/.ssh' && chown -R 4711:4711 'home/lab user'
ip link set lo up
pivot_root . mnt
umount -l mnt
echo /opt/python/lib > /etc/ld.so.conf.d/000python.conf && ldconfig  # where it is a library, it lies there
/opt/python/bin/{interpreter} -m venv --without-pip /opt/swarmd
echo "import sys, site; sys.path += ['/opt/repo', '/opt/repo/cli']; site.addsitedir('/opt/packages')" \\
    > /opt/swarmd/lib/{interpreter}/site-packages/lab.pth
printf '#!/opt/swarmd/bin/python\\nfrom swarmd_cli.main import run\\nrun()\\n' > {swarmd}
chmod 755 {swarmd}
exec env -i container=other PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
    {systemd} --system --log-target=journal --unit=lab.target
"""


def missing() -> str:
    """Why no such machine can be made here; "" when it can."""
    if os.geteuid() != 0:
        return "namespaces of all kinds need root"
    absent = [tool for tool in ("unshare", "nsenter", "ip", "journalctl", SYSTEMD) if shutil.which(tool) is None]
    return f"{' and '.join(absent)} is not installed" if absent else ""


@dataclass(frozen=True)
class Machine:
    """The running lab; ``systemd`` is the id of its first process, seen from outside."""

    systemd: int

    def do(self, *command: str, user: str = "", fails: bool = False) -> str:
        """Run a command inside, as root or as another user with their manager at hand; returns all that it said."""
        enter = ["nsenter", "--target", str(self.systemd), *NAMESPACES, "--"]
        as_user = ["setpriv", "--reuid=4711", "--regid=4711", "--clear-groups", "env", "XDG_RUNTIME_DIR=/run/user/4711"]
        home = "/home/lab user" if user else "/root"
        clean = ["env", "-i", f"HOME={home}", f"USER={user or 'root'}", "PATH=/usr/bin:/bin:/usr/sbin:/sbin"]
        whole = [*enter, *clean, *(as_user if user else []), *command]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)
        assert (done.returncode != 0) == fails, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def swarmd(self, *words: str, user: str = "", fails: bool = False) -> str:
        return self.do(SWARMD, *words, user=user, fails=fails)

    def wait(self, line: str, *command: str, user: str = "") -> str:
        """Ask until a line of the answer is ``line``; returns the answer."""
        deadline = time.monotonic() + 90
        while True:
            done = self.do("sh", "-c", '"$@" 2>&1 || true', "sh", *command, user=user)
            if line in done.splitlines():
                return done
            assert time.monotonic() < deadline, f"never {line!r}: {command}: {done}"
            time.sleep(0.1)


@contextmanager
def machine() -> Iterator[Machine]:
    """Boot one; it ends with the block."""
    text = BOOT.format(
        python=sys.base_prefix,
        packages=sysconfig.get_path("purelib"),
        repo=ROOT,
        interpreter=f"python{sys.version_info.major}.{sys.version_info.minor}",
        swarmd=SWARMD,
        systemd=SYSTEMD,
    )
    apart = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--propagation", "private"]
    with subprocess.Popen([*apart, "bash", "-c", text], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as starter:
        try:
            children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
            deadline = time.monotonic() + 30
            while not (found := children.read_text().split()) and starter.poll() is None:
                assert time.monotonic() < deadline
            assert found, starter.stderr and starter.stderr.read()
            lab = Machine(int(found[0]))
            while Path(f"/proc/{found[0]}/comm").read_text().strip() != "systemd":
                assert starter.poll() is None, starter.stderr and starter.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            lab.wait("running", "systemctl", "is-system-running", "--wait")
            yield lab
        finally:
            starter.send_signal(signal.SIGKILL)  # and with it all inside
