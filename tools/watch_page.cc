// SPDX-License-Identifier: Apache-2.0
#include "tools/watch_page.h"

#include <limits>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "formats/open.h"
#include "lib/audit/comparison.h"
#include "lib/base/checked.h"
#include "lib/base/file.h"
#include "lib/base/text.h"
#include "tools/commands.h"
#include "tools/html_report.h"
#include "tools/outputs.h"
#include "tools/report_sections.h"

namespace reshard::tools {
namespace {

constexpr std::string_view kPageRecord = ".reshard-watch-page.json";
constexpr Index kMaxPageRecordBytes = Index{64} << 20;

void set_files(Json& facts, const std::string& side, const InputFacts& files) {
  facts.set(side + "_files", files.files).set(side + "_bytes", files.bytes);
}

constexpr std::string_view kFactNumbers[] = {"source_files", "source_bytes", "output_files", "output_bytes",
                                             "converted"};

// Fails unless the facts of a step in the record are what measure() writes.
Status check_facts(const Json& facts) {
  TRY(facts.as_object());
  for (const std::string_view key : kFactNumbers)
    if (facts.contains(key) && TRY(facts.get_index(key)) < 0)
      return corrupt("'" + std::string(key) + "': expected a number of at least 0");
  if (const Json* moved = facts.find("moved")) TRY(moved->as_object());
  return {};
}

Index number_of(const Json* facts, const std::string& key) {
  const auto value = facts ? facts->get_index(key) : Result<Index>(Index{0});
  return value ? *value : 0;
}

// Adds a number of the record, which may be anything.
void add(Index& sum, Index number) { sum = checked_add(sum, number).value_or(std::numeric_limits<Index>::max()); }

Index nanoseconds_of(Index seconds) {
  return checked_mul(seconds, 1'000'000'000).value_or(std::numeric_limits<Index>::max());
}

std::string_view name_of(WatchedStep::State state) {
  switch (state) {
    case WatchedStep::State::kConverted:
      return "converted";
    case WatchedStep::State::kRemoved:
      return "converted, then removed";
    case WatchedStep::State::kFailed:
      return "failed";
    case WatchedStep::State::kIncomplete:
      return "incomplete";
    case WatchedStep::State::kSkipped:
      break;
  }
  return "not selected";
}

std::span<const Json::Member> members_of(const Json& object) { return *object.as_object(); }

// Returns the layers that any step moved, each where the first step that has it puts it.
std::vector<std::string> layers_of(const std::vector<const Json*>& moved) {
  std::vector<std::string> out;
  std::set<std::string, std::less<>> seen;
  for (const Json* step : moved)
    if (step)
      for (const Json::Member& layer : members_of(*step))
        if (!layer.key.empty() && seen.insert(layer.key).second) out.push_back(layer.key);
  return out;
}

}  // namespace

Result<WatchPage> WatchPage::open(const std::string& page, const std::string& root, const ConvertOptions& options) {
  WatchPage out(options);
  out.page_ = page;
  out.root_ = root;
  out.record_ = path_join(root, kPageRecord);
  TRY(check_report(page, kHtmlReport));
  if (!TRY(path_exists(out.record_))) return out;
  const Json json = TRY(parse_json(TRY(read_whole_file(out.record_, kMaxPageRecordBytes)), out.record_));
  const std::span<const Json::Member> steps = TRY(json.get_object("steps").context(out.record_));
  for (const Json::Member& step : steps) {
    TRY(check_facts(step.value).context(out.record_ + ": step '" + step.key + "'"));
    out.facts_.set(step.key, step.value);
  }
  return out;
}

Status WatchPage::measure(const WatchedStep& step, double seconds, const std::string& before,
                          const std::string& before_path) {
  Json facts = Json::object();
  for (const auto& [side, path] : {std::pair("source", step.source), std::pair("output", step.output)}) {
    if (!TRY(path_exists(path))) continue;
    const OpenCheckpoint open = TRY(open_checkpoint(path));
    const InputFacts files = facts_of(path, open.reader->catalog());
    set_files(facts, side, files);
    facts.set("converted", files.newest_ns / 1'000'000'000);  // the output's, which is the last
  }
  if (seconds >= 0) facts.set("seconds", seconds);
  if (!before.empty()) {
    facts.set("since", before);
    if (const Status compared = compare(before_path, step.output, facts); !compared) {
      if (interrupted()) return compared.error();
      facts.set("remark", compared.error().message());
    }
  }
  facts_.set(step.name, std::move(facts));
  return replace_file(record_, to_text(Json::object().set("steps", facts_), 1) + "\n");
}

// Fills "changed" and "moved". Compares the tensors that both have: outputs may lack the optimizer.
Status WatchPage::compare(const std::string& before_path, const std::string& output, Json& facts) const {
  const bool is_output = parent_path(before_path) == root_;
  const OpenCheckpoint a =
      TRY(is_output ? open_checkpoint(before_path) : options_->source_layout.open(before_path, true));
  const OpenCheckpoint b = TRY(open_checkpoint(output));
  const RunOptions run = TRY(options_->resources.run_options());
  const auto comparison = TRY(Comparison::prepare(*a.reader, *b.reader,
                                                  {.model = TRY(options_->model.choice()),
                                                   .config = options_->model.config,
                                                   .spool = temporary_directory(),
                                                   .run = run}));
  const std::vector<Comparison::Distance> distances = TRY(comparison->distances());
  std::vector<std::string> layers;
  std::map<std::string, RelativeChange> sums;
  Index different = 0, elements = 0;
  for (std::size_t i = 0; i < distances.size(); ++i) {
    const Tensor& tensor = comparison->b().tensors()[comparison->pairs()[i].b];
    const std::string layer = layer_name(layer_of(tensor.name));
    if (!sums.contains(layer)) layers.push_back(layer);
    for (const std::string& of : {layer, std::string()}) sums[of].add(distances[i].l2, distances[i].a_l2);
    different += distances[i].different;
    elements += tensor.elements();
  }
  if (elements == 0) return {};
  Json moved = Json::object();
  moved.set("", sums[""].value());
  for (const std::string& layer : layers) moved.set(layer, sums[layer].value());
  facts.set("changed", static_cast<double>(different) / static_cast<double>(elements)).set("moved", std::move(moved));
  return {};
}

Json WatchPage::data(const std::string& run, const std::vector<WatchedStep>& steps) const {
  Json rows = Json::array(), cells = Json::array(), names = Json::array();
  std::vector<const Json*> moved;
  for (const WatchedStep& step : steps) {
    Json row = Json::object();
    row.set("name", step.name).set("number", step.number).set("state", name_of(step.state));
    const Json* const facts = facts_.find(step.name);
    if (facts)
      for (const Json::Member& fact : members_of(*facts))
        if (fact.key != "moved") row.set(fact.key, fact.value);
    if (!step.remark.empty()) row.set("remark", step.remark);
    moved.push_back(facts ? facts->find("moved") : nullptr);
    if (moved.back())
      if (const Json* whole = moved.back()->find("")) row.set("moved", *whole);
    rows.push_back(std::move(row));
  }
  const std::vector<std::string> layers = layers_of(moved);
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    names.push_back(layers[layer]);
    for (std::size_t s = 0; s < moved.size(); ++s)
      if (const Json* value = moved[s] ? moved[s]->find(layers[layer]) : nullptr) {
        Json cell = Json::array();
        cell.push_back(layer).push_back(s).push_back(*value);
        cells.push_back(std::move(cell));
      }
  }
  Json out = answer_json("watch");
  out.set("run", run).set("steps", std::move(rows)).set("layers", std::move(names));
  return out.set("moved", std::move(cells));
}

Status WatchPage::write(const std::string& run, const std::vector<WatchedStep>& steps) const {
  InputFacts from{.path = run}, to{.path = root_};
  for (const WatchedStep& step : steps) {
    const Json* const facts = facts_.find(step.name);
    if (TRY(path_exists(step.source)))
      add(from.files, number_of(facts, "source_files")), add(from.bytes, number_of(facts, "source_bytes"));
    if (step.state != WatchedStep::State::kConverted) continue;
    add(to.files, number_of(facts, "output_files")), add(to.bytes, number_of(facts, "output_bytes"));
    to.newest_ns = std::max(to.newest_ns, nanoseconds_of(number_of(facts, "converted")));
  }
  return write_html(page_, "watch", {from, to}, data(run, steps));
}

}  // namespace reshard::tools
