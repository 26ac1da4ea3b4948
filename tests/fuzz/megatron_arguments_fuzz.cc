// Fuzzes pickles of Megatron's args: degrees of parallelism are positive, a config.json made from them can be read, and
// the args made from that config are equal after writing and reading them.
#include <cstddef>
#include <cstdint>
#include <string>

#include "formats/megatron/arguments.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input_file.h"

namespace reshard::megatron_arguments_fuzz {

using namespace reshard::megatron;

namespace {

const Catalog& catalog() {
  static const Catalog it = [] {
    Catalog out;
    for (const char* name : {"embedding.word_embeddings.weight", "output_layer.weight"}) {
      Tensor t;
      t.name = name;
      t.shape = {64, 32};
      require(out.add(std::move(t)).has_value());
    }
    return out;
  }();
  return it;
}

}  // namespace

FUZZ_TARGET(megatron_arguments)(const std::uint8_t* data, std::size_t size) {
  const auto document = pickle::parse(std::string(reinterpret_cast<const char*>(data), size), "input");
  if (!document) return 0;
  for (const auto& [name, value] : sample_counts(document->root())) require(!name.empty());
  const Arguments args = Arguments::read(document->root());
  if (const auto degrees = degrees_of(args)) {
    for (const Index n : {degrees->tp, degrees->pp, degrees->ep, degrees->etp, degrees->vpp, degrees->dp})
      require(n > 0);
    require(!mesh_text(*degrees).empty());
  }
  require(vocabulary_of(args, catalog()) >= 0);
  const MadeConfig made = make_config(args, catalog());
  require(made.config.has_value() == made.why_not.empty());
  if (!made.config) return 0;
  const auto same = arguments_of(*made.config);
  if (!same) return 0;
  pickle::PickleWriter w;
  same->write(w);
  const auto again = pickle::parse(std::move(w).finish(), "again");
  require(again.has_value());
  const Arguments read = Arguments::read(again->root());
  for (const char* name : {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"})
    require(read.number(name) == same->number(name));
  return 0;
}

}  // namespace reshard::megatron_arguments_fuzz
