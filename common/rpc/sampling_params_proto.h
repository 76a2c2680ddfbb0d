// The wire's sampling parameters as the services' own struct, unset fields at their documented
// defaults, and back. Checks nothing: ValidateSamplingParams does.
#ifndef ISOBIT_COMMON_RPC_SAMPLING_PARAMS_PROTO_H_
#define ISOBIT_COMMON_RPC_SAMPLING_PARAMS_PROTO_H_

#include "common/config/sampling_params.h"
#include "isobit/v1/types.pb.h"

namespace isobit {

SamplingParams SamplingParamsFromProto(const v1::SamplingParams& proto);

// Its inverse: every field set.
v1::SamplingParams SamplingParamsToProto(const SamplingParams& params);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SAMPLING_PARAMS_PROTO_H_
