"""Programs that try to get out of the sandbox, or to harm the machine from inside.

Each program runs after `PRELUDE` and after the lines that give it the prey's place (`sandbox_attacks.Host.known`). A
program calls `won(what)` when it got something that it must not have. The host finds its effects on the host itself. No
program would do lasting damage if it succeeded: a `reboot` requests "Ctrl-Alt-Del off", a clock is set to the time that
it shows.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, gc, glob, os, platform, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == 'x86_64'
def won(what): print('WON', what, flush=True)
def attempt(function, *arguments):
    try: return function(*arguments)
    except Exception as error: print(type(error).__name__, str(error)[:60])
def show(path):
    with open(path, 'rb') as file: print(file.read(100000).decode('latin1'))
def put(path, text='x', mode='w'):
    with open(path, mode) as file: file.write(text)
def call(name, x86, arm, *arguments):
    result = libc.syscall(x86 if X86 else arm, *arguments)
    won(name) if result >= 0 else print(name, os.strerror(ctypes.get_errno()))
def name_it(): libc.prctl(15, TOKEN.encode(), 0, 0, 0)
def daemon(work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            name_it()
            work()
        os._exit(0)
def find():
    for base in ['/', '/tmp', '/dev/shm', '/var/tmp', '/home', '/etc', '/usr', '/opt', '/run', os.path.expanduser('~')]:
        for folder, folders, files in os.walk(base):
            if folder.count('/') > 4: folders.clear()
            yield from (f'{folder}/{file}' for file in files if TOKEN in file)
"""

_ONE_CELL = """
### read_shadow
for path in ['/etc/shadow', '/etc/gshadow', '/etc/sudoers']:
    attempt(show, path)
    if os.path.exists(path): won(path)
### read_home
attempt(show, HOME_FILE)
attempt(show, os.path.expanduser('~/') + os.path.basename(HOME_FILE))
### read_checkout
attempt(show, CHECKOUT + '/setup.py')
if os.path.exists(CHECKOUT + '/setup.py'): won('checkout')
### read_secret_file
attempt(show, SECRET_FILE)
### read_other_sandbox
for path in [*find(), *glob.glob('/proc/*/root/tmp/*'), *glob.glob('/proc/*/cwd/*')]: attempt(show, path)
### read_by_dots
for up in ['/..', '/proc/self/cwd/..', '/proc/self/root/..']: attempt(show, up + '/..' * 20 + SECRET_FILE)
### read_by_symlink
for i, path in enumerate([SECRET_FILE, '/proc/1/root' + SECRET_FILE, '/../..' + HOME_FILE]):
    os.symlink(path, f'link{i}')
    attempt(show, f'link{i}')
### read_by_hardlink
attempt(os.link, SECRET_FILE, 'hard')
attempt(show, 'hard')
attempt(os.link, sys.executable, 'python')
if os.path.exists('python'): won('link')
### read_by_handle
handle = ctypes.create_string_buffer(struct.pack('IiQ', 8, 1, 2) + bytes(128))
for place in ['/', '/usr/lib', sys.executable]:
    call('open_by_handle_at', 304, 265, os.open(place, os.O_RDONLY), handle, 0)
### read_devices
for i, (major, minor) in enumerate([(254, 0), (8, 0), (259, 0), (1, 1), (1, 11)]):
    attempt(os.mknod, f'device{i}', 0o60666, os.makedev(major, minor))
    if os.path.exists(f'device{i}'): won('mknod')
for name in ['mem', 'kmsg', 'port', 'vda', 'sda', 'nvme0n1', 'kvm', 'fuse', 'nvidia0', 'vsock', 'net/tun']:
    if attempt(os.open, '/dev/' + name, os.O_RDONLY) is not None: won(name)
### read_kernel
for path in ['kcore', 'kallsyms', 'keys', 'sys/kernel/core_pattern', 'cmdline', 'modules', 'kmsg', '../sys/kernel']:
    if os.path.exists('/proc/' + path): won(path)
### read_mounts
for path in glob.glob('/proc/*/mount*') + glob.glob('/proc/*/task/*/mount*'):
    attempt(show, path)
    if attempt(lambda: open(path).read()): won(path)
request = struct.pack('IIQQQ', 32, 0, 2 ** 64 - 1, 0, 0)
call('listmount', 458, 458, request, ctypes.create_string_buffer(8192), 1000, 0)
call('statmount', 457, 457, request, ctypes.create_string_buffer(8192), 8192, 0)
### read_names_of_disks
import fcntl
for path in ['/usr/bin', '/usr/lib', os.__file__, sys.executable]:
    for request in (0x80811501, 0x81009431):
        attempt(lambda: won(fcntl.ioctl(os.open(path, os.O_RDONLY), request, bytes(256))))
### read_names_of_the_host
names = [str(text) for text in (os.environ, sys.path, sys.argv, sys.orig_argv, sys.modules, sys.flags, os.__file__)]
for path in glob.glob('/proc/self/*') + glob.glob('/proc/self/fd/*'):
    names.append(str(attempt(os.readlink, path)))
    if os.path.isfile(path) and not path.endswith(('/mem', '/pagemap')):
        names.append(str(attempt(lambda: open(path, 'rb').read(1 << 20))))
names += [frame.f_code.co_filename for frame in sys._current_frames().values()]
for prey in (CHECKOUT, SECRET_FILE, HOME_FILE):
    if any(os.path.dirname(prey + '/x') in name for name in names): won(prey)
if HOSTNAME in (socket.gethostname(), os.uname().nodename, attempt(os.getlogin)): won('host name')
### read_environment
print(os.environ)
for path in [*glob.glob('/proc/*/environ'), f'/proc/{PID}/environ', f'/proc/{os.getppid()}/environ']:
    attempt(show, path)
### read_processes
for name in os.listdir('/proc'):
    if name.isdigit() and int(name) != os.getpid():
        attempt(show, f'/proc/{name}/cmdline')
        won('process ' + name)
### read_proc_of_others
for pid in dict.fromkeys([VICTIM, PID, 1]):
    for name in ['environ', 'mem', 'maps', 'cmdline', 'status', 'cwd', 'root', 'exe', 'fd', 'task']:
        attempt(os.listdir if name in ('cwd', 'root', 'fd', 'task') else show, f'/proc/{pid}/{name}')
        if os.path.lexists(f'/proc/{pid}/{name}'): won(f'{pid} {name}')
### write_outside
for place in PLACES:
    attempt(os.makedirs, place)
    attempt(put, place + '/' + TOKEN)
### write_python
for path in [os.__file__, sys.executable, os.path.dirname(os.__file__) + '/__pycache__/x', sys.prefix + '/lib/x.pth']:
    attempt(put, path, '', 'a')
    attempt(os.utime, path)
    attempt(os.chmod, path, 0o777)
    if os.access(path, os.W_OK): won(path)
### write_after_remount
for place in ['/', '/usr/lib', os.path.dirname(os.path.dirname(os.__file__))]:
    for flags in [32, 32 | 4096, 1 << 18, 4096]:
        if libc.mount(place.encode(), place.encode(), None, flags, None) == 0: won('mount ' + place)
    attempt(put, place + '/' + TOKEN)
    if os.path.exists(place + '/' + TOKEN): won(place)
### write_kernel_settings
for path in ['sys/kernel/core_pattern', 'sys/kernel/hostname', 'sys/vm/overcommit_memory', 'sysrq-trigger']:
    if attempt(os.open, '/proc/' + path, os.O_WRONLY) is not None: won(path)
### write_identity
for name in ['uid_map', 'gid_map', 'setgroups']: attempt(put, '/proc/self/' + name, '0 0 4294967295')
for function in (os.setuid, os.setgid, os.seteuid): attempt(function, 0)
if 0 in (os.getuid(), os.geteuid(), os.getgid()) or '4294967295' in open('/proc/self/uid_map').read(): won('root')
### write_setuid_program
import shutil
shutil.copy('/bin/sh', 'sh')
attempt(os.chown, 'sh', 0, 0)
attempt(os.chmod, 'sh', 0o6755)
for program in ['./sh -p -c', 'su root -c', 'unshare -r sh -c', 'nsenter -t 1 -a sh -c', 'sudo -n sh -c']:
    def run(): return subprocess.run([*program.split(), 'id -u'], capture_output=True, timeout=1).stdout
    if attempt(run) == b'0\\n': won(program)
### tcp_by_address
for address in ADDRESSES: attempt(socket.create_connection, (address, PORT), 0.3)
### tcp_by_name
for name in ['localhost', HOSTNAME]: attempt(socket.create_connection, (name, PORT), 0.3)
### tcp_by_program
for program in [f'bash -c echo>/dev/tcp/127.0.0.1/{PORT}', f'nc -w1 127.0.0.1 {PORT}', f'curl 127.0.0.1:{PORT}']:
    attempt(lambda: subprocess.run(program.split(' ', 2), timeout=1, capture_output=True))
### udp
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for address in ADDRESSES: attempt(sender.sendto, b'x', (address, PORT))
### dns
if attempt(socket.getaddrinfo, 'example.org', 80): won('dns')
### unix_socket
for path in [UNIX, '/proc/1/root' + UNIX, '/..' + UNIX]: attempt(socket.socket(socket.AF_UNIX).connect, path)
### abstract_socket
attempt(socket.socket(socket.AF_UNIX).connect, '\\0' + TOKEN)
### odd_sockets
for family in ['VSOCK', 'PACKET', 'NETLINK', 'ALG', 'CAN', 'BLUETOOTH', 'TIPC', 'QIPCRTR', 'RDS']:
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        if attempt(lambda: socket.socket(getattr(socket, 'AF_' + family), kind)): won(family)
if attempt(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1): won('raw')
### ptrace
for pid in {PID, VICTIM, 1, os.getppid()}:
    for request in (16, 0x4206):
        if libc.ptrace(request, pid, None, None) == 0: won(f'ptrace {pid}')
if libc.ptrace(0, 0, None, None) == 0: won('traceme')
### process_memory
buffer = ctypes.create_string_buffer(4096)
local, remote = struct.pack('QQ', ctypes.addressof(buffer), 4096), struct.pack('QQ', id(os) & ~4095, 4096)
for pid in {PID, VICTIM, 1, os.getppid()}:
    call('process_vm_readv', 310, 270, pid, local, 1, remote, 1, 0)
    call('process_vm_writev', 311, 271, pid, local, 1, remote, 1, 0)
### signal_others
for pid in {PID, VICTIM, 1, os.getppid()} - {0, os.getpid()}:
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL): attempt(os.kill, pid, number)
### signal_all
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL): attempt(os.kill, -1, number)
attempt(os.killpg, 0, signal.SIGKILL)
### process_descriptors
for pid in {PID, VICTIM, 1}:
    fd = libc.syscall(434, pid, 0)
    for target in range(8 if fd >= 0 else 0): call('pidfd_getfd', 438, 438, fd, target, 0)
    if fd >= 0 and libc.syscall(424, fd, 9, None, 0) == 0 and pid != 1: won('pidfd_send_signal')
### hobble_the_supervisor
for function, *arguments in [
    (os.setpriority, os.PRIO_PROCESS, 1, 19), (os.setpriority, os.PRIO_USER, os.getuid(), 19),
    (os.sched_setaffinity, 1, [0]), (os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0)),
    (resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1)), (resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0)),
]: attempt(lambda: (function(*arguments), won(function.__name__)))
### daemon_outlives_the_wall_clock
daemon(lambda: time.sleep(60))
time.sleep(60)
### daemon_outlives_the_conversation
daemon(lambda: time.sleep(60))
### ignore_signals
name_it()
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: attempt(signal.signal, number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: time.sleep(1)
### stop_itself
name_it()
if os.fork() == 0: time.sleep(60)
os.kill(os.getpid(), signal.SIGSTOP)
### loop_in_c
name_it()
pow(7, 10 ** 10 ** 6, 10 ** 5000 + 7)
### loop_in_many
for _ in range(8):
    if os.fork() == 0: break
name_it()
while True: pass
### fork_bomb
name_it()
while True:
    try: os.fork()
    except OSError: pass
### fork_bomb_in_sessions
name_it()
while True:
    try: os.fork() or os.setsid()
    except OSError: pass
### thread_bomb
name_it()
started = 0
while started < 200:
    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError: break
    started += 1
else: won('threads')
### disk_bomb
total = 0
try:
    for i in range(10 ** 6):
        with open(f'f{i}', 'wb', buffering=0) as file:
            for _ in range(30): total += file.write(bytes(1 << 20))
except OSError as error: print(error)
if total > 100 << 20: won(total)
### inode_bomb
count = 0
try:
    while count < 50000:
        put(f'i{count}', '')
        count += 1
    won('inodes')
except OSError as error: print(error)
### sparse_bomb
for size in [1 << 50, 1 << 40, 1 << 33]:
    with open('s', 'wb') as file: attempt(lambda: (file.truncate(size), won(size)))
### rlimits_upward
for name in [name for name in dir(resource) if name.startswith('RLIMIT_')]:
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    for wanted in [hard + 1, resource.RLIM_INFINITY] if hard != resource.RLIM_INFINITY else []:
        attempt(lambda: (resource.setrlimit(kind, (wanted, wanted)), resource.getrlimit(kind)[1] != hard and won(name)))
if resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY: won('address space')
### core_limit
before = resource.getrlimit(resource.RLIMIT_CORE)
for soft, hard in [(0, 1), (0, 0), (1, 1 << 40)]:
    attempt(resource.setrlimit, resource.RLIMIT_CORE, (soft, hard))
    attempt(resource.prlimit, 0, resource.RLIMIT_CORE, (soft, hard))
    call('setrlimit', 160, 164, resource.RLIMIT_NOFILE, 0) # a null pointer
    libc.syscall(160 if X86 else 164, resource.RLIMIT_CORE, struct.pack('QQ', soft, hard))
if before[0] > 1 or resource.getrlimit(resource.RLIMIT_CORE) != before: won('a core dump')
### output_flood
while True: print('x' * 100000)
### error_flood
while True: sys.stderr.write('x' * 100000)
### binary_flood
while True: os.write(1, os.urandom(1 << 20))
### invalid_utf8
os.write(1, bytes(range(128, 256)) * 1000 + b'\\xed\\xa0\\x80\\x00\\x1b]0;x\\x07')
print('\\ud800')
### huge_repr
[0] * 10 ** 7
### huge_error
raise ValueError('x' * 10 ** 7)
### deep_recursion
sys.setrecursionlimit(10 ** 9)
def f(): f()
f()
### namespaces
for flag in [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80]:
    if libc.unshare(flag) == 0: won(f'unshare {flag:#x}')
for path in glob.glob('/proc/*/ns/*'):
    fd = attempt(os.open, path, os.O_RDONLY)
    if fd is not None and libc.setns(fd, 0) == 0: won('setns ' + path)
calls = [(56 if X86 else 220, flag | 17, 0, 0, 0, 0) for flag in (0x10000000, 0x10020000, 0x50000000)]
for number, *arguments in [*calls, (435, struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)]:
    pid = libc.syscall(number, *arguments)
    if pid == 0: os._exit(0)
    if pid > 0: won('clone')
### mounts
for kind in [b'proc', b'tmpfs', b'sysfs', b'overlay', b'devtmpfs', b'cgroup2', b'mqueue']:
    if libc.mount(b'x', b'/tmp', kind, 0, None) == 0: won(kind)
if libc.umount2(b'/proc', 2) == 0: won('umount')
if libc.chroot(b'/tmp') == 0: won('chroot')
call('pivot_root', 155, 41, b'/tmp', b'/tmp')
call('fsopen', 430, 430, b'tmpfs', 0)
call('open_tree', 428, 428, -100, b'/', 1)
### keys
call('add_key', 248, 217, b'user', TOKEN.encode(), b'x', 1, -4)
call('request_key', 249, 218, b'user', TOKEN.encode(), 0, -4)
call('keyctl', 250, 219, 0, -4, 0)
### bpf_and_perf
call('bpf', 321, 280, 0, bytes(128), 128)
call('perf_event_open', 298, 241, struct.pack('IIQ', 1, 112, 0) + bytes(96), 0, -1, -1, 0)
### userfaultfd
call('userfaultfd', 323, 282, 1)
if os.path.exists('/dev/userfaultfd'): won('/dev/userfaultfd')
### io_uring
call('io_uring_setup', 425, 425, 8, ctypes.create_string_buffer(120))
### personality
call('personality', 135, 92, 0x0040000)
### reboot_and_modules
call('reboot', 169, 142, 0xfee1dead, 672274793, 0, 0)
call('kexec_load', 246, 104, 0, 0, 0, 0)
call('swapoff', 168, 225, b'/nothing')
call('init_module', 175, 105, b'x', 1, b'')
### clock_and_names
call('settimeofday', 164, 170, struct.pack('qq', int(time.time()), 0), 0)
attempt(lambda: (time.clock_settime(time.CLOCK_REALTIME, time.time()), won('clock')))
attempt(lambda: (socket.sethostname(TOKEN), won('hostname')))
### terminal_input
import fcntl
for path in ['tty', 'console', 'tty0', 'pts/0', 'pts/1', 'ptmx', 'fd/0', 'fd/1', 'stdin']:
    attempt(lambda: (fcntl.ioctl(os.open('/dev/' + path, os.O_RDWR | os.O_NOCTTY), 0x5412, b'x'), won(path)))
### foreign_system_calls
import mmap
if X86:  # getpid by int 0x80: the numbers of the filter do not fit it
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex('b814000000cd80c3'))
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    won('int 0x80')
### x32_system_calls
if X86 and libc.syscall(0x40000000 + 39) > 0: won('x32')
"""


def read(text: str) -> dict[str, tuple[str, ...]]:
    """Split a text into programs.

    Args:
        text: Programs, each after a line `### NAME`. `>>> ` begins a further cell.

    Returns:
        The cells of each program by its name.
    """
    programs = {}
    for block in text.split("### ")[1:]:
        name, _, code = block.partition("\n")
        programs[name] = tuple(code.split(">>> "))
    return programs


ONE_CELL = read(_ONE_CELL)
