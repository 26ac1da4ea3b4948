// SPDX-License-Identifier: Apache-2.0
#include "tools/plan_page.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"
#include "tools/plan_report.h"

namespace reshard::tools {
namespace {

constexpr Index kMaxGroups = 128;

// The files of a catalog in groups of `size`, so that a page has at most kMaxGroups rows.
struct Groups {
  explicit Groups(const std::vector<CatalogFile>& all)
      : files(all), size(std::max<Index>(1, ceil_div(std::ssize(all), kMaxGroups))), bytes(count()) {}

  std::size_t count() const { return ceil_div(std::ssize(files), size); }
  std::size_t of(std::uint32_t file) const { return file / static_cast<std::size_t>(size); }
  Json to_json() const {
    Json out = Json::array();
    for (std::size_t g = 0; g < count(); ++g) {
      const std::size_t first = g * static_cast<std::size_t>(size);
      const Index left = files.size() - first;
      out.push_back(
          Json::object().set("first", files[first].path).set("count", std::min(size, left)).set("bytes", bytes[g]));
    }
    return out;
  }

  const std::vector<CatalogFile>& files;
  Index size;
  std::vector<Index> bytes;
};

struct Flow {
  Index bytes = 0, moves = 0;
};

class Flows {
 public:
  Flows(const Catalog& source, const Catalog& target) : sources_(source.files), targets_(target.files) {}

  void add(const Tensor& from, const Tensor& to) {
    const FragmentIndex index(from.fragments);
    for (const FragmentList* list : {&to.fragments, &to.replicas})
      for (std::size_t i = 0; i < list->size(); ++i) {
        const std::size_t target = targets_.of(list->extent(i).file);
        index.overlapping(list->box(i), [&](std::size_t k, const Box& both) {
          const std::size_t source = sources_.of(from.fragments.extent(k).file);
          const Index bytes = volume(both) * byte_size(from.dtype);
          Flow& flow = flows_[{target, source}];
          flow.bytes += bytes, ++flow.moves;
          sources_.bytes[source] += bytes;
          targets_.bytes[target] += volume(both) * byte_size(to.dtype);
        });
      }
  }
  void set_in(Json& json) const {
    Json flows = Json::array();
    for (const auto& [way, flow] : flows_) {
      Json row = Json::array();
      row.push_back(way.first);
      row.push_back(way.second);
      row.push_back(flow.bytes);
      row.push_back(flow.moves);
      flows.push_back(std::move(row));
    }
    json.set("sources", sources_.to_json()).set("targets", targets_.to_json()).set("flows", std::move(flows));
  }

 private:
  Groups sources_, targets_;
  std::map<std::pair<std::size_t, std::size_t>, Flow> flows_;
};

}  // namespace

Json plan_page_json(const PreparedConversion& prepared, const ConvertOptions& options) {
  const Conversion& c = *prepared.conversion;
  Flows flows(c.source_view(), c.target_view());
  for (const PlannedTensor& p : c.plan().tensors)
    flows.add(c.source_view().tensors()[p.from], c.target_view().tensors()[p.to]);
  Json ranks = Json::array();
  for (const Index bytes : c.bytes_of_ranks()) ranks.push_back(bytes);
  Json json = plan_json(prepared, options, "plan");
  flows.set_in(json);
  return json.set("rank_bytes", std::move(ranks));
}

}  // namespace reshard::tools
