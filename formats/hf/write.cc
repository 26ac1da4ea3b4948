#include "formats/hf/write.h"

#include "formats/tensor_files/target.h"

namespace reshard {

// By value, as Format::lay_out has it. NOLINTNEXTLINE(performance-unnecessary-value-param)
Result<std::unique_ptr<Target>> lay_out_safetensors(LayoutRequest request) {
  return lay_out_model(request, "model", Container::kSafetensors);
}

}  // namespace reshard
