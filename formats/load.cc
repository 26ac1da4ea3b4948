// SPDX-License-Identifier: Apache-2.0
#include "formats/load.h"

#include <utility>

#include "formats/open.h"

namespace reshard {

Result<OpenLoad> open_load(const std::string& path, LoadOptions options, const OpenOptions& how) {
  OpenLoad out;
  out.reader = TRY(open_checkpoint(path, how)).reader;
  out.load = TRY(Load::prepare(*out.reader, std::move(options)));
  return out;
}

Result<LoadReport> load(const std::string& path, LoadOptions options, const GiveMemory& memory) {
  const OpenLoad open = TRY(open_load(path, std::move(options)));
  std::vector<Destination> destinations;
  for (const LoadTensor& tensor : open.load->tensors()) destinations.push_back(TRY(memory(tensor)));
  return open.load->run(destinations);
}

}  // namespace reshard
