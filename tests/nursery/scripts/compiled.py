"""torch.compile under a launcher; the optimizer and the compiler bring torch._dynamo."""

import torch

model = torch.nn.Linear(4, 2)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(lambda x: torch.relu(model(x)).sum() * 2)
for _ in range(2):
    optimizer.zero_grad()
    loss = step(torch.ones(3, 4))
    loss.backward()
    optimizer.step()
print("losses", float(loss))
