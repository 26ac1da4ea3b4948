// Fuzzes DeepSpeed's model states and ZeRO optimizer files, as torch.save: accepted files name each parameter once and
// have valid slices and shapes.
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "formats/deepspeed/rank_files.h"
#include "lib/base/checked.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::deepspeed_fuzz {

using namespace reshard::deepspeed;

namespace {

void check(const ModelStates& states) {
  std::set<std::string> names;
  for (const Group& group : states.groups.value_or(std::vector<Group>()))
    for (const NamedShape& p : group) {
      require(names.insert(p.name).second);
      require(checked_volume(p.shape).has_value());
    }
}

void check(const OptimizerStates& states) {
  for (const auto& slices : states.slices)
    for (const Slice& s : slices) require(s.start >= 0 && s.length >= 0 && checked_add(s.start, s.length).has_value());
  for (const GroupState& group : states.groups) {
    if (group.master) require(group.master->shape().rank() == 1 && group.master->strides[0] == 1);
    for (const auto& [name, tensor] : group.tensors) require(tensor.shape().rank() <= 1);
  }
}

}  // namespace

FUZZ_TARGET(deepspeed)(const std::uint8_t* data, std::size_t size) {
  const File& file = input_file(data, size);
  if (const auto content = TensorFile::open(file)) {
    const auto states = read_model_states(*content, "input");
    if (states) check(*states);
    require(states || !states.error().message().empty());
  }
  const auto torch = TorchFile::open(file, 0, static_cast<Index>(size));
  for (const bool with_slices : {false, true}) {
    if (!torch) break;
    const auto states = read_optimizer_states(*torch, "input", with_slices);
    if (states) check(*states);
    require(states || !states.error().message().empty());
  }
  return 0;
}

}  // namespace reshard::deepspeed_fuzz
