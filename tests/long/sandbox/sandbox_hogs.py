"""Attacks on scarce resources: memory, processor time, and other limits of a user or the host.

`sandbox_programs.py` describes the programs. `MEMORY` holds the attacks whose peak memory `sandbox_attacks` prints;
each tries to get gigabytes.
"""

from __future__ import annotations

from tests.long.sandbox.sandbox_programs import read

_HELPERS = """
import fcntl, mmap
libc.mmap.restype, libc.memset.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
def map_shared(size, fd=-1):
    address = libc.mmap(None, size, 3, 0x21 if fd < 0 else 1, fd, 0)
    return None if address in (None, 2 ** 64 - 1) else address
def fill(descriptor, write):
    os.set_blocking(descriptor, False)
    try:
        while True: write(bytes(30000))
    except OSError: pass
def grow(end): attempt(end.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
def ignore_children(flags=0):
    class Action(ctypes.Structure):
        _fields_ = [('handler', ctypes.c_void_p), ('mask', ctypes.c_ulong * 16), ('flags', ctypes.c_int),
                    ('restorer', ctypes.c_void_p)]
    libc.sigaction(signal.SIGCHLD, ctypes.byref(Action(handler=0 if flags else 1, flags=flags)), None)
def leave(work):
    if os.fork() == 0:
        threading.Thread(target=work).start()
        libc.syscall(60 if X86 else 93, 0) # exit, of the main thread alone: /proc shows a zombie
def wait(): time.sleep(60)
def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until: pass
def burn_in_children(seconds, each):
    for _ in range(int(seconds / each)):
        if os.fork() == 0: burn(each), os._exit(0)
        attempt(os.wait)
    won(f'{seconds} s')
"""

_MEMORY = """
### memory_bomb
data = []
while True: data.append(bytearray(16 << 20))
### memory_bomb_in_c
libc.mmap.restype, libc.memset.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for _ in range(400):
    address = libc.mmap(None, 16 << 20, 3, 0x22, -1, 0)
    if address in (None, 2 ** 64 - 1): break
    libc.memset(address, 1, 16 << 20)
else: won('6 GB')
### memory_bomb_in_many
for _ in range(30):
    if os.fork() == 0: break
data = []
while True:
    try: data.append(os.urandom(1 << 20) * 8)
    except MemoryError: time.sleep(60)
### memory_files
for i in range(200):
    fd = attempt(os.memfd_create, 'm')
    if fd is None: break
    for _ in range(60): os.write(fd, bytes(1 << 20))
else: won('12 GB')
### shared_memory
for i in range(50):
    if libc.shmget(i + 7, 64 << 20, 0o1666) >= 0: won('shmget')
from multiprocessing.shared_memory import SharedMemory
kept = [attempt(SharedMemory, None, True, 50 << 20) for _ in range(20)]
for memory in filter(None, kept): ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory.buf)), 1, 50 << 20)
### pipe_buffers
kept = []
while len(kept) < 500:
    try: kept.append(os.pipe())
    except OSError: break
    os.set_blocking(kept[-1][1], False)
    attempt(os.write, kept[-1][1], bytes(1 << 20))
else: won('pipes')
### socket_buffers_in_many
for _ in range(30):
    if os.fork() == 0: break
kept = []
while len(kept) < 120:
    kept.append(socket.socketpair())
    for end in kept[-1]:
        end.setblocking(False)
        attempt(end.send, bytes(200000))
time.sleep(1)
won('3600 sockets')
### shared_memory_of_children
for i in range(60):
    address = map_shared(50 << 20)
    if address is None: break
    libc.memset(address, 1, 50 << 20)
    if os.fork() == 0: time.sleep(60)
    libc.munmap(address, 50 << 20)
else: won('3 GB')
### shared_memory_by_its_last_page
for i in range(60):
    address = map_shared(50 << 20)
    if address is None: break
    libc.memset(address, 1, 50 << 20)
    libc.munmap(address + 4096, (50 << 20) - 4096)
else: won('3 GB')
### shared_memory_of_zeros
zero = os.open('/dev/zero', os.O_RDWR)
for i in range(60):
    address = map_shared(50 << 20, zero)
    if address is None: break
    libc.memset(address, 1, 50 << 20)
    libc.munmap(address + 4096, (50 << 20) - 4096)
else: won('3 GB')
### huge_pages
for size in (1 << 21, 1 << 30):
    for flags in (0x40022, 0x40021): # private, shared
        if libc.mmap(None, size, 3, flags, -1, 0) not in (None, 2 ** 64 - 1): won('a huge page')
### unaccepted_connections
kept = [socket.socket(socket.AF_UNIX) for _ in range(8)]
for i, listener in enumerate(kept):
    listener.bind(f'\\0{i}'), listener.listen(4096)
    for _ in range(1000):
        end = socket.socket(socket.AF_UNIX)
        grow(end), end.setblocking(False)
        if end.connect_ex(f'\\0{i}'): break
        fill(end.fileno(), end.send), end.close()
    else: won('1000 connections')
### datagrams_of_the_closed
kept = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(200)]
for i, receiver in enumerate(kept):
    receiver.bind(f'\\0{i}')
    for _ in range(11):
        end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        grow(end), end.setblocking(False)
        for size in (1, 200000, 4000000): attempt(end.sendto, bytes(size), f'\\0{i}')
        end.close()
time.sleep(1)
won('2200 datagrams')
### pipes_in_flight
carriers = [socket.socketpair() for _ in range(30)]
for i in range(1000):
    ends = os.pipe()
    attempt(fcntl.fcntl, ends[1], fcntl.F_SETPIPE_SZ, 1 << 20)
    fill(ends[1], lambda data: os.write(ends[1], data))
    try: socket.send_fds(carriers[i % 30][0], [b'x'], ends[:1])
    except OSError: break
    finally: os.close(ends[0]), os.close(ends[1])
else: won('1 GB')
time.sleep(0.5)
### sockets_in_flight
carriers = [socket.socketpair() for _ in range(30)]
for i in range(1000):
    ends = socket.socketpair()
    grow(ends[1]), fill(ends[1].fileno(), ends[1].send)
    try: socket.send_fds(carriers[i % 30][0], [b'x'], [ends[0].fileno()])
    except OSError: break
    finally: ends[0].close(), ends[1].close()
else: won('1000 sockets')
time.sleep(0.5)
### pages_for_a_byte
with open('pages', 'wb') as file: file.write(bytes(16 << 20))
pages, kept = os.open('pages', os.O_RDWR), []
for i in range(100):
    kept.append(socket.socketpair())
    fill(kept[-1][1].fileno(), lambda _: os.sendfile(kept[-1][1].fileno(), pages, i * 4096 % (16 << 20), 1))
    if attempt(os.splice, pages, kept[-1][1].fileno(), 1): won('splice')
### memory_between_calls
def take(*_):
    for _ in range(30):
        if os.fork() == 0: break
    data = []
    while True:
        try: data.append(os.urandom(1 << 20) * 8)
        except MemoryError: time.sleep(60)
signal.signal(signal.SIGALRM, take)
signal.setitimer(signal.ITIMER_REAL, 1)
>>> 'pause'
### memory_of_dead_leaders
def work():
    kept = [os.urandom(1 << 20) * 8 for _ in range(20)]
    put(f'got{os.getpid()}'), wait()
for _ in range(8): leave(work)
while len(glob.glob('got*')) < 8: time.sleep(0.01)
won('1280 MB')
### memory_of_dead_leaders_between_calls
def work():
    time.sleep(0.5)
    kept = [os.urandom(1 << 20) * 8 for _ in range(20)]
    wait()
for _ in range(8): leave(work)
>>> 'pause'
### memory_of_dying_leaders
def work(depth=0):
    global kept
    if not depth: kept = [os.urandom(1 << 20) * 8 for _ in range(20)]
    threading.Thread(target=work, args=[1]).start()
for _ in range(8): leave(work)
time.sleep(4)
won('1280 MB')
### page_tables
for _ in range(3):
    if os.fork() == 0: break
for i in range(30000): # one page in each gigabyte, mapped and read: two pages of page tables each
    libc.mmap(1 << 44 | i << 30, 4096, 1, 0x108022, -1, 0)
time.sleep(1)
won('960 MB')
### mappings
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
start = libc.mmap(None, 60000 << 12, 0, 0x22, -1, 0)
for i in range(0, 60000, 2): libc.mprotect(start + (i << 12), 4096, 1)
for _ in range(22):
    if os.fork() == 0: wait()
time.sleep(20)
won('300 MB')
### epoll_watches
import select
files, polls = [os.pipe()[0] for _ in range(40)], [select.epoll() for _ in range(60)]
for poll in polls:
    for file in files:
        for fd in range(160, 250): poll.register(os.dup2(file, fd), 1)
time.sleep(1)
won('40 MB')
### memory_of_the_undumpable
libc.prctl(4, 0, 0, 0, 0)
for _ in range(8):
    if os.fork() == 0: break
kept = [os.urandom(1 << 20) * 8 for _ in range(20)]
put(f'got{os.getpid()}')
while len(glob.glob('got*')) < 8: time.sleep(0.01)
won('1280 MB')
"""

_TIME = """
### time_of_ignored_children
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
burn_in_children(20, 0.1)
### time_of_short_lives
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
burn_in_children(20, 0.004)
### time_of_children_without_wait
ignore_children(flags=2)
burn_in_children(20, 0.02)
### time_of_grandchildren
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def work():
    if os.fork() == 0: burn(0.05), os._exit(0)
    attempt(os.wait), os._exit(0)
for _ in range(400):
    if os.fork() == 0: work()
    attempt(os.wait)
won('20 s')
### time_between_calls
signal.signal(signal.SIGALRM, lambda *_: (burn(0.5), ends.append(time.time())))
signal.setitimer(signal.ITIMER_REAL, 1)
ends = []
>>> 'pause'
>>> if ends and time.time() - ends[0] > 0.3: won('time while nobody looked')
### time_after_a_forged_end
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
frame, found, ends = sys._getframe(), [], []
while frame:
    found += [value[:16] for value in frame.f_locals.values() if isinstance(value, bytes)]
    frame = frame.f_back
for nonce in found: attempt(os.write, 3, nonce)
burn(1), ends.append(time.time())
while True: burn(1)
>>> 'pause'
>>> if ends and time.time() - ends[0] > 0.3: won('time while nobody looked')
"""

_SCARCE = """
### inotify_instances
for _ in range(200): call('inotify_init1', 294, 26, 0)
if X86: call('inotify_init', 253, 0)
### files_of_dead_leaders
def work():
    kept = [os.pipe() for _ in range(120)]
    put(f'got{os.getpid()}'), wait()
for _ in range(8): leave(work)
while len(glob.glob('got*')) < 8: time.sleep(0.01)
time.sleep(0.5)
won('1920 descriptors')
### files_of_threads
threading.stack_size(65536)
counts = []
def work():
    call('close_range', 436, 436, 5000, 5000, 2) # CLOSE_RANGE_UNSHARE
    call('unshare', 272, 97, 0x400) # CLONE_FILES
    kept = []
    try:
        while len(kept) < 120: kept.append(os.pipe())
    except OSError as error: print(error)
    counts.append(2 * len(kept)), wait()
for _ in range(8): threading.Thread(target=work, daemon=True).start()
while len(counts) < 8: time.sleep(0.01)
time.sleep(0.5)
if sum(counts) > 600: won(f'{sum(counts)} descriptors')
### files_of_threads_by_clone
if X86: # a thread that exits at once, on a stack of its own
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex('b83c00000031ff0f05'))
    stack = ctypes.create_string_buffer(1 << 16)
    top = ctypes.addressof(stack) + (1 << 15) & ~15
    ctypes.c_ulong.from_address(top).value = ctypes.addressof(ctypes.c_char.from_buffer(page))
    call('clone', 56, 220, 0x10B00, ctypes.c_void_p(top), 0, 0, 0) # CLONE_THREAD without CLONE_FILES
### asynchronous_io_events
contexts = [ctypes.c_ulong(0) for _ in range(20)]
for context in contexts: call('io_setup', 206, 0, 30000, ctypes.byref(context))
### out_of_memory_score
for path in ['/proc/self/oom_score_adj', '/proc/self/oom_adj', f'/proc/{os.getpid()}/task/{os.getpid()}/oom_score_adj']:
    for score in ('0', '-1000', '-17', '999'): attempt(put, path, score)
if open('/proc/self/oom_score_adj').read() != '1000\\n': won('oom_score_adj')
### leases
import fcntl
own = [os.__file__, sys.executable, '/bin/sh']
for path in [*own, *glob.glob('/usr/lib/*/libc.so*'), *glob.glob('/opt/packages/0/*/*.py')]:
    for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):
        attempt(lambda: (fcntl.fcntl(os.open(path, os.O_RDONLY), fcntl.F_SETLEASE, kind), won(path)))
    attempt(lambda: (fcntl.fcntl(os.open(os.path.dirname(path), 0), fcntl.F_NOTIFY, 1), won('F_NOTIFY')))
### message_queues
call('mq_open', 240, 180, TOKEN.encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
call('msgget', 68, 186, 0, 0o1666)
### pipe_and_socket_sizes
import fcntl
attempt(lambda: (fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20), won('F_SETPIPE_SZ')))
attempt(lambda: (socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20), won('SO_SNDBUF')))
### rulesets
call('landlock_create_ruleset', 444, 444, struct.pack('QQ', 1, 0), 16, 0)
### other_threads_of_the_core
if libc.prctl(62, 1, 0, 0, 0) == 0: won('core scheduling')
### syncs
for _ in range(100): os.sync()
"""


def _with_helpers(text: str) -> dict[str, tuple[str, ...]]:
    return {name: (_HELPERS + cells[0], *cells[1:]) for name, cells in read(text).items()}


MEMORY = _with_helpers(_MEMORY)
TIME = _with_helpers(_TIME)
SCARCE = _with_helpers(_SCARCE)
