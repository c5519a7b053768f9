"""Attacks of several cells: on the protocol between parent and sandbox, and on other conversations.

`sandbox_programs.py` describes the programs; `>>> ` begins the next cell.
"""

from __future__ import annotations

from tests.long.sandbox.sandbox_programs import read

# Several cells of one conversation. `'honest N'` must be answered with its own text.
_MANY_CELLS = """
### printed_frames
for frame in [b'done', b'end exit 0', b'gone 0', b'ready', b'started'.ljust(16)]: os.write(1, frame), os.write(2, frame)
>>> 'honest 2'
### frames_on_every_descriptor
for fd in map(int, os.listdir('/proc/self/fd')):
    for frame in [b'done', b'end memory', b'gone 0', b'kill 0', bytes(16), bytes(70000)]: attempt(os.write, fd, frame)
>>> 'honest 2'
>>> 'honest 3'
### stolen_nonce
frame, found = sys._getframe(), [o[:16] for o in gc.get_objects() if isinstance(o, bytes)]
while frame:
    found += [value[:16] for value in frame.f_locals.values() if isinstance(value, bytes)]
    frame = frame.f_back
for nonce in found * 3: attempt(os.write, 3, nonce)
time.sleep(0.3)
>>> 'honest 2'
>>> 'honest 3'
### values_that_nobody_asked_for
frame, found = sys._getframe(), set()
while frame:
    found |= {value[:16] for value in frame.f_locals.values() if isinstance(value, bytes)}
    frame = frame.f_back
for nonce in found:
    for value in [b'done', b'end memory', bytes(65536), bytes(100000)]: attempt(os.write, 3, nonce + value)
time.sleep(0.3)
>>> 'honest 2'
>>> 'honest 3'
### read_the_channel
os.set_blocking(3, False)
for fd in os.listdir('/proc/self/fd'): attempt(lambda: print(os.read(int(fd), 10000)))
os.set_blocking(3, True)
>>> 'honest 2'
### answer_for_the_next
def answer():
    packet = os.read(3, 1 << 17)
    os.write(1, b'forged')
    os.write(3, packet[:16])
threading.Thread(target=answer, daemon=True).start()
>>> 1
>>> 2
### channel_flood
def flood():
    while True: os.write(3, bytes(16))
threading.Thread(target=flood, daemon=True).start()
>>> 'honest 2'
### descriptors_to_the_parent
channel = socket.socket(fileno=3)
for _ in range(50): attempt(lambda: socket.send_fds(channel, [b'done'], [0, 1, 2]))
channel.detach()
>>> 'honest 2'
### pickles
import pickle
class Touch:
    def __reduce__(self): return (os.system, (f'touch {PUBLIC}/{TOKEN}',))
for fd in (1, 2, 3): attempt(os.write, fd, pickle.dumps(Touch()))
Touch()
>>> 'honest 2'
### patched_runner
import ast, builtins, linecache, traceback
for module in (ast, traceback, linecache, socket):
    for name in dir(module):
        if callable(getattr(module, name)): attempt(setattr, module, name, lambda *a, **k: 'patched')
sys.stdout = sys.stderr = None
builtins.compile = builtins.exec = builtins.open = lambda *a, **k: print('patched')
>>> 1
### forgotten_modules
sys.modules.clear(), sys.path.clear(), sys.meta_path.clear()
del __builtins__
>>> 1
### closed_descriptors
os.closerange(0, 1000)
>>> 'honest 2'
### exit_in_the_middle
os._exit(0)
>>> 'honest 2'
### segmentation_fault
ctypes.string_at(0)
>>> 'honest 2'
### second_runner
for _ in range(3): os.fork()
print('x')
>>> 'honest 2'
### objects_of_the_runner
for thing in gc.get_objects():
    if isinstance(thing, socket.socket): attempt(thing.send, b'done'), attempt(thing.send, b'end closed')
for fd in range(4, 100): attempt(os.close, fd)
>>> 'honest 2'
"""

# Each cell is a conversation of its own. The last one looks for traces of the others.
_MANY_CONVERSATIONS = """
### files_for_the_next
for place in [*PLACES, '.', '/tmp', '/dev/shm', '/', '/proc']: attempt(put, f'{place}/{TOKEN}')
>>> for path in find(): won(path)
### variables_for_the_next
import json, builtins
builtins.left = json.left = os.left = sys.left = left = os.environ['LEFT'] = TOKEN
>>> import json, builtins
for place in (builtins, json, os, sys, sys.modules['__main__']):
    if hasattr(place, 'left') or 'LEFT' in os.environ: won(place)
### sockets_for_the_next
def serve():
    kept = socket.socket(socket.AF_UNIX), socket.socket()
    kept[0].bind('\\0left' + TOKEN), kept[0].listen(), kept[1].bind(('', 4567)), kept[1].listen(), time.sleep(60)
daemon(serve)
time.sleep(0.2)
>>> for family, address in [(socket.AF_UNIX, '\\0left' + TOKEN), (socket.AF_INET, ('127.0.0.1', 4567))]:
    attempt(lambda: (socket.socket(family).connect(address), won(address)))
### descriptors_for_the_next
import fcntl
fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
fcntl.flock(0, fcntl.LOCK_EX)
>>> import fcntl
if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_NONBLOCK: won('flags')
"""

MANY_CELLS = read(_MANY_CELLS)
MANY_CONVERSATIONS = read(_MANY_CONVERSATIONS)
