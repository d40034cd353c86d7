"""Who trains which sample when: one order per epoch, one position in it, dealt to any number of ranks.

permutation.py  the epoch's order, from (seed, epoch) alone
shards.py       the same for data that can only be read in sequence
position.py     how much of the order is trained; what a snapshot keeps
seeds.py        random numbers of a sample's augmentation
place.py        this process's rank and world
loader.py       DataLoader: all of it around torch's loader
sampler.py      DistributedSampler: for those who keep torch's loader
"""
