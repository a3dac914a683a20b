"""The parts of a generated Python file that are the same for all networks."""

HEAD = '''\
"""A network trained by coadjoint {version}, written by `coadjoint export --to torch`.

    network = load()
    network.predict(x)

{about}

Needs torch and the file of tensors beside this one; nothing else.
"""

import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

'''

READER = '''

DTYPES = {"F32": torch.float32, "F64": torch.float64, "BOOL": torch.bool}


def read_tensors(path):
    """The tensors of a safetensors file, by name."""
    content = Path(path).read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, stop = entry["data_offsets"]
        part = bytearray(content[begin + first : begin + stop])
        flat = torch.frombuffer(part, dtype=DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def load(path=Path(__file__).with_suffix(".safetensors")):
    """The network with its weights."""
    network = Network()
    network.load_state_dict(read_tensors(path))
    return network.eval()
'''

PADDED = '''

def padded(x, lengths=None):
    """Sequences as one array [B, T, columns] of float64, and their lengths [B].

    x: such an array, or a list of sequences [T_i, columns].
    """
    if lengths is None and isinstance(x, (list, tuple)):
        parts = [torch.as_tensor(part, dtype=torch.float64) for part in x]
        lengths = [len(part) for part in parts]
        x = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    x = torch.as_tensor(x, dtype=torch.float64)
    if x.dim() != 3 or x.shape[2] != COLUMN_COUNT or not x.shape[1]:
        raise ValueError(f"x must be [B, T, {COLUMN_COUNT}]; got {list(x.shape)}.")
    if lengths is None:
        lengths = [x.shape[1]] * len(x)
    lengths = torch.as_tensor(lengths, dtype=torch.int64, device=x.device)
    if lengths.shape != (len(x),) or lengths.min() < 1 or lengths.max() > x.shape[1]:
        raise ValueError(f"lengths must be {len(x)} numbers from 1 to {x.shape[1]}.")
    return x, lengths
'''

LAST = '''

def last(y, lengths):
    """Each sequence's last step of y [T, B, .]."""
    return y[lengths - 1, torch.arange(len(lengths), device=y.device)]
'''

REVERSE = '''

def reverse(y, lengths):
    """Each sequence of y [T, B, .] from its end; what follows it stays."""
    t = torch.arange(len(y), device=y.device)[:, None]
    places = torch.where(t < lengths, lengths - 1 - t, t)
    return y.gather(0, places[..., None].expand_as(y))
'''

SCAN = '''

def scan(step, sequences, state, alive):
    """x_t = step(..., x_{t-1}): each slot at all steps, [T, B, d], and after the last one.

    Where a sequence has ended (alive is False), its state stays.
    """
    states = []
    for t in range(len(alive)):
        new = step(*(sequence[t] for sequence in sequences), *state)
        state = [torch.where(alive[t], after, before) for after, before in zip(new, state)]
        states.append(state)
    return [torch.stack(slot) for slot in zip(*states)], state
'''

# Methods of the class. {call} runs the network from x to what `outputs` returns.
OF_SEQUENCES = '''
    @torch.no_grad()
    def {name}(self, x, lengths=None):
        """{sentence}

        x        [B, T, columns], or a list of sequences [T_i, columns]
        lengths  [B], the steps of each sequence in a padded x
        """
        x, lengths = padded(x, lengths)
        return self.outputs(self(self.inputs(x), lengths))
'''

OF_SAMPLES = '''
    @torch.no_grad()
    def {name}(self, x):
        """{sentence}

        x: [B, ...], samples in the units of the training data.
        """
        x = torch.as_tensor(x, dtype=torch.float64)
        return self.outputs(self(self.inputs(x)))
'''

LABELS_OF_SEQUENCES = '''
    def predict(self, x, lengths=None):
        """The label of each sequence; arguments as in `predict_proba`."""
        numbers = self.predict_proba(x, lengths).argmax(-1).tolist()
        return [LABELS[number] for number in numbers]
'''

LABELS_OF_STEPS = '''
    def predict(self, x, lengths=None):
        """A list of labels for each sequence; arguments as in `predict_proba`."""
        x, lengths = padded(x, lengths)
        rows = []
        for shares, length in zip(self.predict_proba(x, lengths), lengths.tolist()):
            rows.append([LABELS[number] for number in shares[:length].argmax(-1).tolist()])
        return rows
'''

LABELS_OF_SAMPLES = '''
    def predict(self, x):
        """The label of each sample; x as in `predict_proba`."""
        return [LABELS[number] for number in self.predict_proba(x).argmax(-1).tolist()]
'''
