#include "tests/support/device_ranks.h"

#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "lib/transport/nccl.h"
#include "tests/support/local_ranks.h"
#include "tests/support/one_gpu_ranks.h"
#include "tests/support/split_device.h"

namespace reshard {
namespace {

// The shared state of a rank's two threads: the thread of the control transport lends it to that of the data transport.
struct Rank {
  std::promise<Transport*> lent;
  std::promise<Status> done;
  bool works = false;
};

}  // namespace

std::string why_no_gpu_ranks() {
  if (const auto device = open_device("cuda", 0); !device) return device.error().message();
  if (const auto id = make_nccl_id(); !id) return id.error().message();
  return "";
}

Status run_device_ranks(int n, RankDevice kind,
                        const std::function<Status(Transport& ranks, Transport& data, Device& device)>& work) {
  std::vector<Rank> all(static_cast<std::size_t>(n));
  const auto of = [&](const Transport& transport) -> Rank& { return all[static_cast<std::size_t>(transport.rank())]; };
  const auto work_with = [&](Transport& data, Device& device) {
    Rank& rank = of(data);
    rank.works = true;
    Status status = work(*rank.lent.get_future().get(), data, device);
    rank.done.set_value(status);
    return status;
  };
  const auto on_gpu = [&](Transport& data) -> Status {
    const auto gpu = TRY(open_device("cuda", 0));
    return work_with(data, *gpu);
  };
  const auto on_split_device = [&](Transport& data) {
    SplitDevice device;
    DeviceTransport of_device(data);
    return work_with(of_device, device);
  };
  Status of_data;
  std::thread moving([&] {
    of_data = kind == RankDevice::kGpu ? run_nccl_ranks_on_one_gpu(n, {}, on_gpu) : run_local_ranks(n, on_split_device);
    for (Rank& rank : all)
      if (!rank.works) rank.done.set_value(of_data);
  });
  const Status status = run_local_ranks(n, [&](Transport& ranks) {
    of(ranks).lent.set_value(&ranks);
    return of(ranks).done.get_future().get();
  });
  moving.join();
  return status ? of_data : status;
}

}  // namespace reshard
