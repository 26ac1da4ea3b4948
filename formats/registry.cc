// SPDX-License-Identifier: Apache-2.0
#include "formats/registry.h"

#include <algorithm>

#include "formats/bin/bin.h"
#include "formats/colossalai/colossalai.h"
#include "formats/dcp/dcp.h"
#include "formats/deepspeed/deepspeed.h"
#include "formats/fsdp/fsdp.h"
#include "formats/gguf/gguf.h"
#include "formats/hdf5/hdf5.h"
#include "formats/hf/hf.h"
#include "formats/megatron/fsdp_dtensor.h"
#include "formats/megatron/megatron.h"
#include "formats/meta/meta.h"
#include "formats/nanotron/nanotron.h"
#include "formats/orbax/orbax.h"
#include "formats/ranks/ranks.h"
#include "formats/torch_checkpointing/torch_checkpointing.h"
#include "formats/vllm/vllm.h"
#include "lib/base/choices.h"
#include "lib/base/text.h"

namespace reshard {
FormatTable& formats() {
  static FormatTable table({&kMegatronLegacyFormat,
                            &kMegatronLegacyLocalFormat,
                            &kMegatronFormat,
                            &kDcpFormat,
                            &kTorchCheckpointingFormat,
                            &kNanotronFormat,
                            &kColossalaiFormat,
                            &kFsdpFormat,
                            &kDeepspeedFormat,
                            &kDeepspeedUniversalFormat,
                            &kVllmFormat,
                            &kVllm013Format,
                            &kRanksFormat,
                            &kMetaFormat,
                            &kHfFormat,
                            &kBinFormat,
                            &kOrbaxFormat,
                            &kOrbaxZarr2Format,
                            &kHdf5Format,
                            &kHdf5ViewFormat,
                            &kGgufFormat});
  return table;
}

std::vector<const Format*> written_formats() {
  std::vector<const Format*> out = {&kHfFormat, &kDcpFormat};  // what most people want is read first
  for (const Format* f : formats())
    if ((f->lay_out || f->write_view) && std::find(out.begin(), out.end(), f) == out.end()) out.push_back(f);
  return out;
}

Result<const Format*> find_format(std::string_view name) {
  for (const Format* f : formats()) {
    if (f->name == name && !f->written_by.empty())
      return unsupported(std::string(f->title) + " can be read but not written; " + std::string(f->written_by));
    if (f->name == name) return f;
  }
  std::vector<std::string> names;
  for (const Format* f : written_formats()) names.emplace_back(f->name);
  std::string meant = choices_text(name, names);
  for (const Format* f : written_formats())  // "safetensors" is a word of a title
    if (const auto words = split(f->title, ' '); std::find(words.begin(), words.end(), name) != words.end())
      meant = choices_text(f->name, names);
  return usage_error("unknown format '" + printable(name) + "'" + meant);
}

Result<const Format*> recognised_format(const PathSnapshot& place) {
  for (const Format* f : formats())
    if (f->recognises) {
      if (TRY(f->recognises(place))) return f;
    }
  return nullptr;
}

}  // namespace reshard
