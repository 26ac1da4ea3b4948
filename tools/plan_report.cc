// SPDX-License-Identifier: Apache-2.0
#include "tools/plan_report.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "lib/base/names.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"
#include "lib/output/upload.h"
#include "tools/commands.h"

namespace reshard::tools {

Result<Index> free_space_for(const std::string& destination) {
  return free_space(destination.empty() ? "." : parent_path(destination));
}

namespace {

std::string family_text(const Translation& names) {
  if (!names.model.family) return "names and rows unchanged";
  const std::string text =
      std::string(names.model.family->title) + ", " + std::string(info(names.model.convention).title);
  return names.to ? text + " -> " + std::string(info(*names.to).title) : text;
}

std::vector<std::string> warnings_of(const PreparedConversion& prepared) {
  const Catalog& source = prepared.source.reader->catalog();
  std::vector<std::string> out = source.warnings;
  if (prepared.conversion->identity()) std::erase(out, source.shape_doubt);
  const auto& more = prepared.conversion->notes().warnings;
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

// Returns the notes to print. Those of the source's reader are about training state, so they are left out if the target
// leaves out that state.
std::vector<std::string> notes_of(const PreparedConversion& prepared) {
  std::vector<std::string> out = prepared.conversion->notes().facts;
  if (prepared.target->holds == StateSupport::kModel) return out;
  const auto& more = prepared.source.reader->catalog().notes;
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

std::string left_out_text(const OmittedState& l) {
  std::vector<std::string> parts;
  if (l.tensors > 0) parts.push_back(count_of(l.tensors, "tensor"));
  if (l.objects > 0) parts.push_back(count_of(l.objects, "object"));
  parts.push_back(human_bytes(l.bytes));
  std::vector<std::string> files;
  if (l.tensors + l.objects == 0)
    for (const std::string& name : l.names) files.push_back(printable(name));
  return l.what + " (" + (files.empty() ? "" : some_of(files) + "; ") + join(parts, ", ") + ")";
}

// Returns, for each file of an output, whether it contains tensor data; the others are metadata.
std::vector<bool> files_with_tensors(const Catalog& catalog) {
  std::vector<bool> out(catalog.files.size());
  for (const Tensor& t : catalog.tensors())
    for (std::size_t i = 0; i < t.fragments.size(); ++i) out[t.fragments.extent(i).file] = true;
  return out;
}

// "4 files and 1 of metadata"
std::string files_text(const Catalog& catalog) {
  const std::vector<bool> holds = files_with_tensors(catalog);
  const Index data = std::count(holds.begin(), holds.end(), true), other = std::ssize(holds) - data;
  return count_of(data, "file") + (other > 0 ? " and " + with_commas(other) + " of metadata" : "");
}

void print_remarks(const PreparedConversion& prepared) {
  std::vector<std::string> left_out;
  for (const OmittedState& l : prepared.conversion->notes().left_out) left_out.push_back(left_out_text(l));
  if (!left_out.empty()) print_row("", "left out: " + join(left_out, ", "));
  for (const std::string& warning : warnings_of(prepared)) print_row("warning", warning);
}

}  // namespace

void print_plan(const PreparedConversion& prepared, const ConvertOptions& options) {
  const Conversion& c = *prepared.conversion;
  print_row("plan",
            std::string(prepared.source.format->title) + " -> " + std::string(prepared.target->title) +
                (prepared.target->takes_mesh() ? " on " + c.options().placement.mesh.to_string() : "") +
                (c.options().placement.layout ? " in layout " + printable(c.options().placement.layout->name) : "") +
                "   " + family_text(c.names()));
  if (const auto& config = c.names().model.config)
    print_row("", (config->architecture.empty() ? config->model_type : printable(config->architecture)) + ", " +
                      printable(config->path));
  const auto free = free_space_for(options.destination);
  print_row("",
            count_of(std::ssize(c.plan().tensors), "tensor") + ", " + human_bytes(c.plan().bytes_read) + " in, " +
                human_bytes(c.disk_needed()) + " out in " + files_text(c.target().catalog()) + "   " +
                count_of(c.plan().moves, "move") +
                (free ? "   disk free " + human_bytes(*free) + (*free < c.disk_needed() ? ", not enough" : "") : ""));
  if (const Merge* merge = c.merge()) {
    print_row("merge", merge->expression.text());
    for (const MergeSource& source : merge->options.sources)
      print_row("", source.name + " = " + printable(source.path));
  }
  for (const auto& [key, value] : prepared.source.reader->catalog().attributes)
    if (key == "weights") print_row(key, printable(value));
  if (c.converted_tensors() > 0)
    print_row("", count_of(c.converted_tensors(), "tensor") + " converted to " +
                      (c.options().typing.dtype ? options.dtype : "the dtype of the model"));
  print_remarks(prepared);
  for (const std::string& note : notes_of(prepared)) print_row("note", note);
}

void print_view_plan(const PreparedConversion& prepared) {
  print_row("plan", std::string(prepared.source.format->title) + " -> " + std::string(prepared.target->title) + "   " +
                        family_text(prepared.conversion->names()));
  print_remarks(prepared);
}

RequestCounts requests_of(const Conversion& c, const ConvertOptions& options) {
  constexpr Index kRead = Index{8} << 20, kListed = 1000, kOfFile = 2, kOfUpload = 3, kOfRun = 8;
  RequestCounts out;
  if (is_url(options.source)) {
    const Index files = std::ssize(c.source_view().files);
    out.read = ceil_div(c.plan().bytes_read, kRead) + kOfFile * files + ceil_div(files, kListed);
  }
  if (!is_url(options.destination)) return out;
  const auto& files = c.target().catalog().files;
  const std::vector<bool> holds = files_with_tensors(c.target().catalog());
  const Index part = Upload::part_bytes(c.target().catalog());
  out.write = kOfRun + std::ssize(c.beside()) + ceil_div(std::ssize(files), kListed);
  for (std::size_t f = 0; f < files.size(); ++f) out.write += holds[f] ? kOfUpload + ceil_div(files[f].size, part) : 1;
  return out;
}

ChosenStrategy choose_strategy(const Conversion& conversion, const ConvertOptions& options, Index ranks,
                               Index machines) {
  ChosenStrategy chosen;
  chosen.estimate = choose_strategy(conversion.plan(), conversion.source_view(), ranks, machines == 1);
  if (conversion.computes() || is_url(options.destination)) {
    chosen.estimate.strategy = Strategy::kDirect;
    chosen.estimate.reason = "each rank reads what it writes";
  }
  chosen.strategy = chosen.estimate.strategy;
  if (options.strategy) chosen.strategy = *options.strategy;
  return chosen;
}

// Returns by how much the fullest rank exceeds the mean: 0.05 for 5 %. Ranks without data do not count.
double imbalance(const std::vector<Index>& bytes) {
  Index sum = 0, most = 0, holders = 0;
  for (const Index n : bytes) {
    sum += n;
    most = std::max(most, n);
    if (n > 0) ++holders;
  }
  return sum == 0 ? 0 : static_cast<double>(most) * static_cast<double>(holders) / static_cast<double>(sum) - 1;
}

std::string mesh_text(const std::vector<Index>& bytes_of_ranks) {
  char over[32];
  std::snprintf(over, sizeof over, "%.1f", 100 * imbalance(bytes_of_ranks));
  return count_of(std::ssize(bytes_of_ranks), "rank") + " to load it: at most " +
         human_bytes(*std::max_element(bytes_of_ranks.begin(), bytes_of_ranks.end())) + " per rank, " + over +
         " % above the mean   " + human_bytes(std::accumulate(bytes_of_ranks.begin(), bytes_of_ranks.end(), Index{0})) +
         " in total";
}

void print_strategy(const ChosenStrategy& chosen, Index ranks, Index machines) {
  const bool as_estimated = chosen.strategy == chosen.estimate.strategy;
  print_row("ranks", count_of(ranks, "rank") + " on " + count_of(machines, "machine") + "   " +
                         std::string(strategy_name(chosen.strategy)) + (as_estimated ? "" : ", by --strategy"));
  if (as_estimated) print_row("", chosen.estimate.reason);
  print_row("", "estimated time in addition to reading and writing: direct " + to_string(chosen.estimate.direct));
  print_row("", "exchange " + to_string(chosen.estimate.exchange));
}

Json plan_json(const PreparedConversion& prepared, const ConvertOptions& options, std::string_view command) {
  const Conversion& c = *prepared.conversion;
  Json left_out = Json::array();
  for (const OmittedState& l : c.notes().left_out)
    left_out.push_back(
        Json::object().set("what", l.what).set("tensors", l.tensors).set("objects", l.objects).set("bytes", l.bytes));
  Json files = Json::array();
  const std::vector<bool> holds = files_with_tensors(c.target().catalog());
  for (std::size_t f = 0; f < holds.size(); ++f) {
    const CatalogFile& file = c.target().catalog().files[f];
    files.push_back(Json::object().set("path", file.path).set("bytes", file.size).set("tensors", bool{holds[f]}));
  }
  Json json = answer_json(command);
  json.set("source", options.source)
      .set("source_format", prepared.source.format->name)
      .set("target_format", options.to)
      .set("mesh", c.options().placement.mesh.to_string())
      .set("layout", c.options().placement.layout ? Json(c.options().placement.layout->name) : Json())
      .set("family", c.names().model.family ? Json(c.names().model.family->name) : Json())
      .set("tensors", c.plan().tensors.size())
      .set("moves", c.plan().moves)
      .set("bytes_read", c.plan().bytes_read)
      .set("bytes_written", c.disk_needed())
      .set("converted_tensors", c.converted_tensors());
  if (const auto memory = c.memory()) json.set("peak_memory", memory->peak).set("slab_bytes", memory->slab_bytes);
  if (const auto free = free_space_for(options.destination)) json.set("disk_free", *free);
  if (const RequestCounts requests = requests_of(c, options); requests.read + requests.write > 0)
    json.set("requests_read", requests.read).set("requests_written", requests.write);
  if (const std::vector<Index> bytes = c.bytes_of_ranks(); bytes.size() > 1)
    json.set("mesh_ranks", bytes.size())
        .set("mesh_bytes", std::accumulate(bytes.begin(), bytes.end(), Index{0}))
        .set("mesh_imbalance", imbalance(bytes));
  if (options.ranks > 1) {
    const auto chosen = choose_strategy(c, options, options.ranks, ceil_div(options.ranks, options.ranks_per_machine));
    json.set("ranks", options.ranks)
        .set("strategy", strategy_name(chosen.strategy))
        .set("strategy_reason", chosen.estimate.reason)
        .set("direct_seconds", chosen.estimate.direct.seconds)
        .set("exchange_seconds", chosen.estimate.exchange.seconds);
  }
  json.set("left_out", std::move(left_out)).set("files", std::move(files));
  json.set("warnings", texts_json(warnings_of(prepared))).set("notes", texts_json(notes_of(prepared)));
  return json;
}

}  // namespace reshard::tools
