"""Several processes: DistributedDataParallel or FSDP2, and nothing else to call. Launch it with

    python -m torch.distributed.run --nproc_per_node 2 --standalone examples/torchrun.py --strategy fsdp

All ranks draw the same weight sample, so averaged gradients belong to it: N processes with a part of the batch each
make the run of one with the whole batch. With FSDP2 the curvature is sharded as the weights are.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import vprop

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
parser.add_argument("--checkpoint", help="a folder to save model and posterior in")
parser.add_argument("--short", action="store_true", help="a few seconds' run")
arguments = parser.parse_args()
epochs = 3 if arguments.short else 30

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)

digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1200], order[1200:]
data = TensorDataset(x[train], y[train])
sampler = DistributedSampler(data, ranks, rank, seed=0)
loader = DataLoader(data, batch_size=128 // ranks, sampler=sampler, drop_last=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
model = DistributedDataParallel(model) if arguments.strategy == "ddp" else fully_shard(model)
# num_data counts the examples of all ranks. The seed is the same everywhere, as it is by default.
optimizer = vprop.Vprop(model.parameters(), lr=0.3, num_data=len(train))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))

for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        with optimizer.sampled_params():
            F.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
        scheduler.step()

model.eval()
probs = torch.zeros(len(test), 10, device=device)
draws = 16
for _ in range(draws):  # works for every strategy; with DDP, optimizer.posterior(model).predict(x) does it, too
    with torch.no_grad(), optimizer.sampled_params(train=False):
        probs += model(x[test].to(device)).softmax(-1) / draws
if arguments.checkpoint:  # any number of ranks can load it, and go on
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=arguments.checkpoint)
if rank == 0:
    accuracy = (probs.argmax(-1).cpu() == y[test]).float().mean()
    log_loss = F.nll_loss(probs.log().cpu(), y[test])
    print(f"{arguments.strategy} on {ranks} ranks: accuracy {accuracy:.3f}, log-loss {log_loss:.3f}")
dist.destroy_process_group()
