"""Virtual machines (QEMU) and their shells, for the programs in this folder. They are emulated, so that they run anywhere; with VM_ACCEL=kvm
they run on the processor."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# A device that can be opened need not work: so the accelerator has to be requested.
ACCELERATOR = os.environ.get("VM_ACCEL", "tcg")
# An emulated machine is slow if other programs use the processors.
START_SECONDS = 30
BOOT_SECONDS = 240
COMMAND_SECONDS = 300


class Failed(Exception):
    pass


class Guest:
    """A virtual machine, and its shell."""

    def __init__(self, name, folder, kernel, memory_mib, devices, processors=1):
        self.name, self.folder = name, folder
        self.log, shell = folder / f"{name}.log", folder / f"{name}.shell"
        arguments = [
            "qemu-system-x86_64", "-machine", f"q35,accel={ACCELERATOR}", "-cpu", "max", "-smp", str(processors), "-m", str(memory_mib),
            "-display", "none", "-no-reboot", "-nodefaults",
            "-serial", f"file:{self.log}", "-serial", f"unix:{shell},server=on,wait=off",
            "-kernel", kernel, "-initrd", str(folder / "initramfs"), "-append", "console=ttyS0 quiet panic=-1", *devices,
        ]  # fmt: skip
        # QEMU's own output, for example that it was ended.
        self.complaints = folder / f"{name}.qemu"
        with self.complaints.open("w") as complaints:
            self.process = subprocess.Popen(arguments, stderr=complaints, preexec_fn=end_with_parent)
        self.socket, self.pending = socket.socket(socket.AF_UNIX), b""
        until(f"{name} does not start", lambda: self.connect(shell), START_SECONDS)

    def connect(self, shell):
        try:
            self.socket.connect(str(shell))
            return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False

    def boot(self):
        """Waits until it has booted."""
        # Input before its shell reads is lost.
        self.socket.settimeout(5)
        deadline = time.monotonic() + BOOT_SECONDS
        while True:
            try:
                self.socket.sendall(b"true\n")
                self.read_answer()
                break
            except TimeoutError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise Failed(f"{self.name} does not boot: {self.console()}") from None
        # Answers to earlier input.
        with contextlib.suppress(TimeoutError):
            while True:
                self.read_answer()

    def read_answer(self):
        while True:
            found = re.search(rb"^ENDED (\d+)\r?\n", self.pending, re.MULTILINE)
            if found:
                output, self.pending = self.pending[: found.start()], self.pending[found.end() :]
                return int(found[1]), output.decode(errors="replace").replace("\r", "").strip()
            more = self.socket.recv(1 << 16)
            if not more:
                raise Failed(f"{self.name} has ended: {self.console()}")
            self.pending += more

    def try_run(self, command, seconds=COMMAND_SECONDS):
        self.socket.settimeout(seconds)
        try:
            self.socket.sendall(command.encode() + b"\n")
            return self.read_answer()
        except TimeoutError:
            raise Failed(f"{self.name} does not end {command!r} within {seconds} s") from None

    def run(self, command, seconds=COMMAND_SECONDS):
        status, output = self.try_run(command, seconds)
        if status != 0:
            raise Failed(f"{self.name}: {command!r} ended with {status}: {output}")
        return output

    def status(self):
        return json.loads(self.run("pumapool status --json"))

    def console(self):
        said = [file.read_text(errors="replace")[-2000:] for file in (self.complaints, self.log) if file.exists()]
        return "".join(said) or "nothing on its console"

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.wait(30)


def end_with_parent():
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    # Signals of the terminal are for the parent.
    os.setpgid(0, 0)


def until(problem, is_so, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise Failed(f"{problem} within {seconds} s")
        time.sleep(0.5)


def network(folder, number, is_first):
    """A network of two machines: the device of one of them."""
    server = "on" if is_first else "off"
    return [
        "-netdev", f"stream,id=net,addr.type=unix,addr.path={folder / 'network'},server={server}",
        "-device", f"virtio-net-pci,netdev=net,mac=52:54:00:00:00:{number:02}",
    ]  # fmt: skip


def make_image(folder, modules, programs):
    """Makes the boot files of the machines. Returns the path of the kernel."""
    image = [HERE / "image", folder, HERE / "pair-guest", *modules, "--", *programs]
    made = subprocess.run(image, stdout=subprocess.PIPE, text=True)
    if made.returncode != 0:
        raise SystemExit(made.returncode)
    return str((ROOT / made.stdout.strip()).resolve())


def make_ext4(disk, files, len_mib):
    """A disk image with those files on it."""
    with disk.open("wb") as image:
        image.truncate(len_mib << 20)
    subprocess.run(["/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-d", files, disk], check=True)
