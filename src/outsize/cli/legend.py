"""What the lines of a plan mean, for `outsize plan --legend`."""

LEGEND = """The lines of a plan:

block        a layer, or the code before (stem) and after (head) the layers; layers with equal values share a line
activations  what happens to what backward needs:
             keep       it stays on the GPU
             recompute  it is computed again in backward
             offload    the layer's input goes to the host, the rest is computed again
             swap       all of it goes to the host and comes back
homes        where weights and optimizer state are between uses. Weights with home `host` are loaded into slots before
             use; optimizer state with home `host` is updated by the CPU. `frozen` weights have no optimizer state.
             `1 gpu + 1 host`: a layer's weights are in several chunks with different homes
weights      bytes of the block's weights. `tied`: counted where they are first used

GPU, host    predicted peak of the budget, and its parts. `slots` are the buffers that weights pass through;
             `gradients` on the host wait for the CPU update
peaks at     the action of the step during which GPU memory is highest: F3 and B3 are forward and backward of block 3
loaded ahead how many blocks before its use a block's weights are loaded

step         predicted seconds of an optimizer step, with all its micro-batches
bottleneck   the lane that bounds the step: GPU compute, copies to the GPU (h2d) or from it (d2h), CPU updates (host).
             `launch-bound`: the GPU waits for Python to launch kernels
lanes        share of the step in which each lane is busy
from         where the numbers are from: measured here, or estimated
found        how many plans were simulated, and why the runner-up was not chosen
rows, split  the batch that is planned, if it follows from the data or from batch_size
run          the steps that are left, and the time they take

faster       settings that train more tokens per second on this machine, each alone
more         what 4 GiB more GPU memory would gain
minimum      the smallest memory that is enough, and the smallest machine of the catalog"""
